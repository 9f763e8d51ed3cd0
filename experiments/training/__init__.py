"""Training on a task of the Long Range Arena: settings, data, steps, records."""
