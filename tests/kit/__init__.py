"""Code that tests share: trainings, processes, commands."""
