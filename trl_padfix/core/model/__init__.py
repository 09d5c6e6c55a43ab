"""What is known of a model, and how its modules are led elsewhere for a forward."""
