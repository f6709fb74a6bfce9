"""``balance.batch`` inside other trainers, one file each; nothing of theirs is imported here."""
