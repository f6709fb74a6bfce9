"""Which ranks compute which expert's rows: policies, planners, proven bounds, workloads."""
