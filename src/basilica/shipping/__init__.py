"""Code that travels: functions, scripts and directories, from their capture to the rank that runs them."""
