"""What several verbs print of plans and steps."""
