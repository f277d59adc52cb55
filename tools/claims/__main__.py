"""Print a row for each page."""

from tools import claims

print(f"{'page':28} computed  constants  neither")
rows = {page: claims.counted(page) for page in claims.PAGES}
for page, (computed, constants, neither) in {**rows, "all": tuple(map(sum, zip(*rows.values())))}.items():
    print(f"{page:28} {computed:8}  {constants:9}  {neither:7}")
