"""The version of the package, which plans and pages name."""

VERSION = "0.1.0"
