"""Sixty faults in the numeric core, made by hand, and a program that counts how many of them the tests see."""
