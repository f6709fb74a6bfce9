"""Where experts lie and where their rows are computed: schedules, a checker, and their bytes."""
