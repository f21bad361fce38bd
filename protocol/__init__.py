"""What every process of twopool agrees on: messages, endpoints, configuration, errors. Imports no torch."""
