"""Calibration of stated confidences."""
