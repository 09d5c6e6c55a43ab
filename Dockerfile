# docker build -t trl-padfix .
# A build of torch for CPUs alone is smaller: --build-arg PIP_OPTIONS="--index-url THE_INDEX_OF_TORCH_FOR_CPUS"
# On a GPU: docker run --gpus all trl-padfix doctor
FROM python:3.13-slim
ARG PIP_OPTIONS=""
WORKDIR /trl_padfix
RUN pip install --no-cache-dir torch ${PIP_OPTIONS}
COPY pyproject.toml README.md LICENSE ./
COPY trl_padfix trl_padfix
RUN pip install --no-cache-dir ".[cli,trl,peft]"
ENTRYPOINT ["trl-padfix"]
CMD ["doctor"]
