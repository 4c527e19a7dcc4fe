"""What runs next, by counts alone; knows no tensor and no text."""
