# SPDX-License-Identifier: Apache-2.0
#
# Print the rows of a query as JSON, one a line: of chDB or DuckDB the SQL, of pandas the
# columns of a file. Times are microseconds since 1970; one without a zone is an error.
#
#   query.py chdb|duckdb SQL
#   query.py pandas FILE

import datetime
import json
import sys


def plain(value):
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            raise SystemExit("a time without a zone")
        since = value - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
        return since // datetime.timedelta(microseconds=1)
    return value


program, query = sys.argv[1:]
if program == "chdb":
    import chdb

    rows = chdb.query(query, "ArrowTable").to_pylist()
elif program == "duckdb":
    import duckdb

    rows = duckdb.sql(query).to_arrow_table().to_pylist()
else:
    import pandas

    rows = pandas.read_parquet(query).to_dict("records")
for row in rows:
    print(json.dumps({name: plain(value) for name, value in row.items()}))
