"""The ranks among which SGLang divides the heads of a prompt. Each is a process with a scheduler of its own."""


class Ranks:
    """A group of torch.distributed, or None for one rank alone."""

    def __init__(self, group=None):
        self._group = group
        self.number, self.rank = 1, 0
        if group is not None:
            import torch.distributed as dist  # noqa: PLC0415 - absent where stand-ins are tested
            self.number, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def agree(self, answer):
        """Returns the first rank's `answer` on every rank.

        SGLang's schedulers look at the same requests in the same order, since they reduce what they find, so all ranks
        call this together.
        """
        if self.number == 1:
            return answer
        import torch.distributed as dist  # noqa: PLC0415
        box = [answer if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self._group, 0), group=self._group)
        return box[0]
