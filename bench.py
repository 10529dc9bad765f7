import torch, time, sys
from dataclasses import replace
from fedkeel.data import load_spec
from fedkeel.engine.batches import ImageStore
f = load_spec("cifar10(size=32)")
print(f.on_disk, f.images.stride())
torch.set_num_threads(1)
held = replace(f, images=f.images.contiguous(), on_disk=False)
g = torch.Generator().manual_seed(0)
idx = [torch.randint(0, 50000, (64,), generator=g) for _ in range(400)]
for last in (False, True):
    for name, fed in (("held", held), ("mapped", f)):
        s = ImageStore(fed, torch.device("cpu"), channels_last=last)
        u = torch.rand(64, fed.train_transform.draws)
        for r in range(2):
            t = time.perf_counter()
            for i in idx: s._gather(i)
            a = time.perf_counter() - t; t = time.perf_counter()
            for i in idx: s.batch(i, u, fed.train_transform)
            b = time.perf_counter() - t
        print(last, name, f"gather {a/400*1e6:.0f} us, batch {b/400*1e6:.0f} us")
