"""Tools around the training of sparse models: capacities, checkpoint surgery, reports."""
