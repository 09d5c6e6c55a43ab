"""TRL's trainers without padding: one mixin over TRL's classes, a module for each trainer."""
