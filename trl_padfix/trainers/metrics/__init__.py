"""What is counted and watched while a trainer runs."""
