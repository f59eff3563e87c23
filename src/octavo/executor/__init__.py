"""Run workers somewhere and look like one worker."""
