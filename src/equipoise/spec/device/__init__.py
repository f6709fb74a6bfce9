"""Devices: what each computes, holds and moves, shipped or measured here."""
