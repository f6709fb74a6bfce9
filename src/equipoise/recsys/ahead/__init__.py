"""What a step does for the steps after it: their input is read and their ids travel early."""
