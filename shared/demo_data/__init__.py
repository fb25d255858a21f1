"""The default data of the recipes: texts, tagged words and pairs of texts, from the sources of installed libraries."""
