"""Programs of other libraries with this one's products; each module needs its library installed."""
