"""Questions that use the search: deadlines, batch sizes, several sizes or clusters, remedies, and layouts as given."""
