# planner in a container: docker build -t planner . && docker run --rm planner plan llama3-8b dgx-h100 --seq-len 8192 --global-batch 64
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .
FROM python:3.12-slim
COPY --from=build /dist /dist
COPY constraints.txt /
RUN pip install --no-cache-dir -c /constraints.txt /dist/*.whl && useradd --create-home planner
USER planner
WORKDIR /home/planner
ENTRYPOINT ["planner"]
