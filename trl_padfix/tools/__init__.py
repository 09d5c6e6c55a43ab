"""What is going on: doctor, stats, comparisons, benchmarks."""
