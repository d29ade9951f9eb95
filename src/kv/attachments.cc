#include "src/kv/attachments.h"

#include <utility>

namespace sluice {

AttachId Attachments::Add(Attachment&& attachment) {
  const AttachId id = next_++;
  all_.emplace(id, std::move(attachment));
  return id;
}

AttachId Attachments::Bind(TransferKey key, std::shared_ptr<Transfer> transfer) {
  Transfer& bound = *transfer;
  bound.attached = Add({std::move(key), std::move(transfer), absl::OkStatus()});
  return bound.attached;
}

AttachId Attachments::Expect(TransferKey key) {
  const AttachId id = Add({key, nullptr, absl::OkStatus()});
  expected_.emplace(std::move(key), id);
  return id;
}

void Attachments::BindExpected(const TransferKey& key, const std::shared_ptr<Transfer>& transfer) {
  const auto expected = expected_.find(key);
  if (expected == expected_.end()) return;
  all_.at(expected->second).transfer = transfer;
  transfer->attached = expected->second;
  expected_.erase(expected);
}

void Attachments::End(Transfer& transfer, const absl::Status& why) {
  if (transfer.attached == 0) return;
  Attachment& attachment = all_.at(transfer.attached);
  attachment.ended = why;
  attachment.transfer = nullptr;
  transfer.attached = 0;
}

Attachment* Attachments::Find(AttachId id) {
  const auto it = all_.find(id);
  return it == all_.end() ? nullptr : &it->second;
}

Attachment Attachments::Remove(AttachId id) {
  const auto it = all_.find(id);
  Attachment removed = std::move(it->second);
  all_.erase(it);
  // After its transfer has ended, another Generate may expect the same key.
  const auto expected = expected_.find(removed.key);
  if (expected != expected_.end() && expected->second == id) expected_.erase(expected);
  if (removed.transfer != nullptr) removed.transfer->attached = 0;
  return removed;
}

}  // namespace sluice
