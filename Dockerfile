# On a CPU:   docker build -t trl-padfix .
# On a GPU:   docker build -t trl-padfix --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
#             docker run --gpus all trl-padfix doctor
FROM python:3.13-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /trl_padfix
RUN pip install --no-cache-dir torch --index-url ${TORCH_INDEX}
COPY pyproject.toml README.md LICENSE ./
COPY trl_padfix trl_padfix
COPY recipes recipes
RUN pip install --no-cache-dir ".[cli,peft]"
ENTRYPOINT ["trl-padfix"]
CMD ["doctor"]
