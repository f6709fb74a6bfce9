"""Documents with images and sound: rows, files, patches, and where items are in documents."""
