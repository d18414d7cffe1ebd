"""What the notebooks measure, one file a stage: functions that return numbers or a table, for any device."""
