# docker build --tag hpgo . && docker run --rm hpgo plan bert-48 --cluster dapple-a --global-batch-size 64
FROM rust:1.95-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends python3-pip
COPY . /source
RUN pip wheel --break-system-packages --no-deps --wheel-dir /wheels /source

FROM python:3.13-slim-bookworm
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[onnx,plot,serve]"
ENTRYPOINT ["hpgo"]
