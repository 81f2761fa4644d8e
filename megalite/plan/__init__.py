"""What every rank holds, computes and sends, from a configuration alone. It imports no torch."""
