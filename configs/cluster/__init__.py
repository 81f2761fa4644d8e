"""The clusters that megalite comes with: one YAML file each, installed as the package `megalite_clusters`."""
