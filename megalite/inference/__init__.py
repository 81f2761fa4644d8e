"""Computing with a trained model: text, scores, perplexity and evaluation tasks."""
