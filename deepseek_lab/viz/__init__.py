"""Drawings from recorded events and plans."""
