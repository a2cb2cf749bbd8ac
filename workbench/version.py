"""The one place that holds the version; the build reads it too."""

VERSION = "0.1.0"
