"""Models, runs, experiments and clusters that megalite comes with: one YAML file each, found by its name.

Installed as the package `megalite_presets`; `megalite.config.presets` reads it.
"""
