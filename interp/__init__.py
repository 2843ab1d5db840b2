"""The study: hooks over a saved checkpoint that say why a model fails on longer inputs."""
