"""Adafactor."""
