"""How `experiments.train` trains: settings, data on the device, the step, its records."""
