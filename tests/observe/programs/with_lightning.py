"""Lightning with two DDP processes that it starts itself. Prints the weights' sum after training."""

import lightning
import torch


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, loader)
    total = sum(p.sum().item() for p in model.parameters())
    print(f"RESULT {trainer.global_rank} {total:.9f}", flush=True)


if __name__ == "__main__":
    main()
