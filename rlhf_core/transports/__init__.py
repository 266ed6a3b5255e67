"""The transport that core brings itself: `local`."""
