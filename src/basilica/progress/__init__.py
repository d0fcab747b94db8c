"""Planned changes: the notice that announces one to ranks, their answers, and the files of both; the order of samples."""
