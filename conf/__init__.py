"""YAML values by config group; the types are in ``pipeline.config``."""
