"""What several test folders share: strategies, tiny models, clusters of real processes."""
