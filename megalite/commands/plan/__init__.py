"""`megalite plan`: the request, ranked layouts, explanations, comparisons and the page."""
