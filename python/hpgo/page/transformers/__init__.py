"""The page that plans transformers: search, compare and change configurations. A level within the package `page`."""
