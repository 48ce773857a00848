"""AlexNet as in "One weird trick": data-parallel convolutions, split linear layers, and either kind alone."""
