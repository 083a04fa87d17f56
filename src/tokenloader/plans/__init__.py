"""Plans: which window is sample i, and where a run is."""
