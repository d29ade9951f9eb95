// The Generates that wait for their caches. Each is bound to a transfer, or to a rendezvous key
// that no Reserve has brought yet. Not thread-safe: TransferStore's lock guards it.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "src/kv/transfer.h"

namespace sluice {

// Tenant and rendezvous_key.
using TransferKey = std::pair<std::string, std::string>;

struct Attachment {
  TransferKey key;                     // under which its transfer may still come
  std::shared_ptr<Transfer> transfer;  // null: expected, or ended
  absl::Status ended;                  // not OK: the transfer ended with this
};

class Attachments {
 public:
  // Binds a new Generate to `transfer`. REQUIRES: no Generate has the transfer.
  AttachId Bind(TransferKey key, std::shared_ptr<Transfer> transfer);
  // Lets a new Generate wait for the Reserve that brings `key`. REQUIRES: no other one does.
  AttachId Expect(TransferKey key);
  // Whether a Generate waits for the Reserve that brings `key`.
  bool Expects(const TransferKey& key) const { return expected_.contains(key); }
  // Returns the number of Generates that wait for a Reserve.
  size_t expected() const { return expected_.size(); }

  // A Reserve has brought `key`: binds the Generate that waits for it, if there is one.
  void BindExpected(const TransferKey& key, const std::shared_ptr<Transfer>& transfer);
  // Tells the transfer's Generate, if it has one, that nothing will come any more, and why.
  void End(Transfer& transfer, const absl::Status& why);

  // Returns null if there is no such Generate.
  Attachment* Find(AttachId id);
  // Forgets a Generate and returns what it was bound to. REQUIRES: Find(id) is not null.
  Attachment Remove(AttachId id);

 private:
  AttachId Add(Attachment&& attachment);

  AttachId next_ = 1;
  absl::flat_hash_map<AttachId, Attachment> all_;
  std::map<TransferKey, AttachId> expected_;
};

}  // namespace sluice
