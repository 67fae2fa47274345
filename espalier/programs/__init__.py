"""The programs of the repository's top, by links, so that an installed package has them: `espalier.command` runs them."""
