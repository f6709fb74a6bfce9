"""What does not fit in memory lies in blocks of a file: tables of rows, slices of experts."""
