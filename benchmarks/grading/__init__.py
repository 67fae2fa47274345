"""The grader: its speed, published cases, pairs whose verdict is known by how they are made, hostile answers."""
